"""Questions that are answered by planning several times: the largest batch that fits, the smallest card."""

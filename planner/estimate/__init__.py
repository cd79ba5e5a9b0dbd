"""From a recording to bytes and time on a card."""

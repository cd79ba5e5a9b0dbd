"""Recordings that are derived from others, so that a step need not be rehearsed again.

`extrapolate` predicts a recording at another number of samples, `graft_update` replaces the optimizer's update, and
`lengthened` puts identical layers into a recording of a model that has only a few of them.
"""

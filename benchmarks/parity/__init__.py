"""Independent judge of training parity: does the rewritten step train what a plain hand-written loop trains?"""

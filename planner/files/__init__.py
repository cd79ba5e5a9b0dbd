"""Reads and writes the files of users. What a file holds is data that may be damaged or made to do harm."""

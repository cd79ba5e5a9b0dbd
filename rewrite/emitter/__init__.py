"""Write a plan as a Python file that needs only torch."""

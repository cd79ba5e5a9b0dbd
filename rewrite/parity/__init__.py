"""Train copies of a model with and without a plan, and compare everything that training changes."""

"""Train copies of a model with and without a plan, and compare everything that training changes.

Read `verify` first. `comparisons` says what is compared, `runs` makes the two runs of a comparison, `reference_step`
is the step that the plan is compared with, and `result` holds one row for each quantity that was compared.
"""

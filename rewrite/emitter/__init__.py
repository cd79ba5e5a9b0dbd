"""Write a plan as a Python file that needs only torch, and transformers or bitsandbytes if the plan uses those."""

"""Choose a plan: propose a configuration, certify it by rehearsal, and repeat."""

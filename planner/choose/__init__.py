"""Chooses a plan: propose a configuration, certify it by rehearsal, and repeat with a smaller budget if needed."""

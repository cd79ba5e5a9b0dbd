"""Code that runs here and is pasted into emitted files. It imports torch and the standard library only."""

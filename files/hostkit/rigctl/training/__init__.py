"""Training of drafters: what each stage does (`step.py`, as the service user), and what root does around them."""

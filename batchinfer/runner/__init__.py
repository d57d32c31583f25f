"""Executes step plans: `base` is the seam, `local` a model in this process (`load` builds it), `fake` one without."""

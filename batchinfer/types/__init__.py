"""The words that travel between rooms: frozen, slotted dataclasses without behaviour.

`rows` (what a row is and how it ends), `request` (what the engine is asked and answers), `step` (what the
scheduler asks of a runner in one step), `streams` (random numbers by row identity). Standard library only.
"""

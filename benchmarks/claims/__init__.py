"""What three texts say about multi-head attention, measured: ``python -m benchmarks.claims``.

``statements`` lists what they say, ``units`` runs the experiments and keeps their results, ``page`` writes
docs/claims.md from them. Every other module is a family of experiments.
"""

"""The experiments, each in a folder: `plan.py` has its runs, `analysis.py` its findings, and
`page.py` its report.
"""

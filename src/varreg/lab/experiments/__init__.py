"""The experiments, a folder for each: `plan.py` says what it needs, `analysis.py` what its results
say, `page.py` what its report shows.
"""

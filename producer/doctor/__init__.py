"""Why a deployment is as fast as it is: samples its metrics, judges them by a table of rules.

pages.py reads workers' /metrics, observation.py samples them and Redis over some seconds,
measures.py turns two samples into numbers, rules.py is the table and its judge, load.py makes load.
"""

"""Bulk jobs: whole files through a model, rows by reference."""

from producer.bulk.job import run_bulk
from producer.bulk.run import BulkProgress, BulkSummary

__all__ = ["BulkProgress", "BulkSummary", "run_bulk"]

"""Inspection: what the heads of a model do, read from outside while it runs."""

from headwise.inspection.record import Call as Call
from headwise.inspection.record import record as record
from headwise.inspection.statistics import HeadStatistics as HeadStatistics
from headwise.inspection.statistics import head_statistics as head_statistics
from headwise.inspection.statistics import strongest_pairs as strongest_pairs

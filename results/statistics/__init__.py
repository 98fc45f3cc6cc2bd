"""Intervals for ratios of times, the variation between cards, and the words for outcomes."""

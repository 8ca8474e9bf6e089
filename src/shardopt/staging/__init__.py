"""Staging: a load that changes nothing until every rank knows it is good."""

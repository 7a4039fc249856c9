"""Checks before a run that read models, data and the machine: they find everything that makes the run impossible.

``skyrl_megatron_observe/__init__.py`` registers them in the order in which their problems are listed. What a check is:
:mod:`skyrl_megatron.checks`.
"""

"""Scoring of responses: the stage, the scorers, the built-in terms and the processes that call functions."""

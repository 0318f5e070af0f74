"""Stages of a pipeline: the share of one micro-batch, divided over an axis whose ranks have other parts of the model.

Each op gets a stage, and the share becomes a bundle: for each stage a program for forward, one for backward, and one
for the update, with sends and receives for what crosses stages.
"""

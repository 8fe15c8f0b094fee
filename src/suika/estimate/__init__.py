"""Samples -> calibration -> iteration time and memory of any (model, layout, placement)."""

"""Predicts before training what a method's steps will take: rehearse, measure the link, apply the formula."""

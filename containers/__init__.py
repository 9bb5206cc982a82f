"""Shipped as package data: images.yaml."""

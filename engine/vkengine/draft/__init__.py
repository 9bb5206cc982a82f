"""Drafters: what to propose for the next round. Proposals never change which tokens come out."""

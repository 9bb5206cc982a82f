"""VKIE: an OpenAI-compatible server over any engine with the API of `vkengine.engine`.

The event loop tokenizes and streams; the engine runs in a thread of its own (`driver.py`).
"""

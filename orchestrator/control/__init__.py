"""The controller and its components. Each component acts on one subject; policies decide.

`components.py` makes them, each from what it uses. They run in one event loop, and wait only with a
timeout or on the loop's `ChangeNotifier`.
"""

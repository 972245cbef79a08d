"""The controller and its components. Each component acts on one subject; policies decide.

Components share a `JobContext`, run in one event loop, and wait only with a timeout or on its
`ChangeNotifier`.
"""

"""Codecs: what values become on the wire. Pure, without collectives: bytes in a fixed layout, the
same on every rank. `engine/comm/coded.py` sends them.
"""

"""Compressed collectives: codecs, quantized and low-rank reductions, and what selects them."""

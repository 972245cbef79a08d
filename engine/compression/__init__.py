"""Compressed collectives: codecs, quantized and low-rank reductions, and their selection."""

"""BERT for sequence classification: what kind of text does a snippet of Python source come from?"""

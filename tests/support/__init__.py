"""What several tests need: processes that act as ranks. No tests of the product live here."""

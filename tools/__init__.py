"""Development tools; not part of the wheel, and not imported by the product."""

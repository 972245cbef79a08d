"""ZeRO itself: tensor placements, weight and gradient stores, gather and reduce scheduling."""

"""ZeRO itself: placements, stores of weights and gradients, when units are gathered and reduced."""

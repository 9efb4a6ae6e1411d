"""What the exercises call: each ``check_...`` compares an answer with the library, and names the likely slip.

A module for each exercise notebook; ``core`` holds what they share. A check passes with one printed line. Otherwise it
raises ``core.CheckFailed``, whose message is meant for the learner, or ``core.NotAttempted``.
"""

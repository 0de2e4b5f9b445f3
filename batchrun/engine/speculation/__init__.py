"""Speculative decoding: what may follow is guessed, and a step verifies several tokens of a request at once.

A guess is accepted where it equals what the target samples there with the request's own noise, so results are those of
plain decoding. A `Drafter` or a `DraftModel` guesses, the `Controller` decides how much of it is worth verifying, and
the `Speculator` joins them to the engine.
"""

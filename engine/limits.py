"""Checks of a request against the model's vocabulary and the tokens that the engine can hold for one sequence."""

from __future__ import annotations

from engine.request import InvalidRequest, PromptTooLong, Request


def limit_tokens(prompt_tokens: int, asked: int | None, capacity: int) -> int:
    """Return `asked`, limited to the tokens that fit after the prompt; see `Engine.limit_tokens`."""
    room = capacity - prompt_tokens
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {prompt_tokens} tokens; prompt and at least one output token must fit into the "
            f"{capacity} tokens that this worker can hold for one sequence"
        )
    return room if asked is None else min(asked, room)


def validate(request: Request, num_ids: int, capacity: int) -> None:
    """Check a request; see `Engine.validate`.

    Args:
        request: any request.
        num_ids: valid token ids are `[0, num_ids)`.
        capacity: longest sequence, in tokens.
    """
    params = request.params
    for key, ids in (
        ("prompt", request.prompt),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [token for token, _ in params.logit_bias]),
    ):
        wrong = next((i for i in ids if not 0 <= i < num_ids), None)
        if wrong is not None:
            raise InvalidRequest(f"{key}: token id {wrong} is not in [0, {num_ids})")
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest(f"min_tokens: {params.min_tokens} is more than max_tokens: {params.max_tokens}")
    if params.max_tokens > limit_tokens(len(request.prompt), None, capacity):
        raise PromptTooLong(
            f"{len(request.prompt)} prompt tokens and max_tokens: {params.max_tokens} exceed the "
            f"{capacity} tokens that this worker can hold for one sequence"
        )

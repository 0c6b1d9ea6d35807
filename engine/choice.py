"""The operations of a step on one choice: append a sampled id, make a delta, make the final output."""

from __future__ import annotations

from engine.outputs import ChoiceResult, Delta, Fault, Finished, Outcome
from engine.sequence import FinishReason, RequestState, Sequence


def append(seq: Sequence, token: int, eos_token_ids: frozenset[int]) -> None:
    """Append a sampled id to a sequence; set `finish_reason` (and `stop`) if the sequence ends with it."""
    params = seq.request.params
    seq.tokens.append(token)
    complete = seq.matcher is not None and seq.matcher.accept(token) and seq.matcher.complete
    if token in params.stop_token_ids:
        seq.stop, seq.finish_reason = token, FinishReason.STOP
        seq.text.add_silent()
    elif token in eos_token_ids and (not params.ignore_eos or complete):
        seq.finish_reason = FinishReason.STOP
        seq.text.add_silent()
    else:
        active = seq.num_output_tokens >= params.min_tokens
        seq.stop = seq.text.push(token, active)
        if seq.stop is not None:
            seq.finish_reason = FinishReason.STOP
            return
        if complete:
            seq.finish_reason = FinishReason.STOP
        elif seq.num_output_tokens >= params.max_tokens:
            seq.finish_reason = FinishReason.LENGTH
    if seq.finish_reason is not None:
        seq.text.finish()


def take_delta(seq: Sequence) -> Delta | None:
    """Return the text and ids of a sequence that no earlier delta had; None if there are none."""
    text, count = seq.text.take()
    if not (text or count):
        return None
    start = seq.num_sent_tokens
    seq.num_sent_tokens += count
    ids = tuple(seq.tokens[seq.num_prompt_tokens + start : seq.num_prompt_tokens + start + count])
    logprobs = tuple(seq.logprobs[start : start + count]) if _wants_logprobs(seq) else None
    return Delta(seq.request.id, seq.index, text, ids, logprobs)


def final_output(state: RequestState, outcome: Outcome, fault: Fault | None, message: str | None) -> Finished:
    """Return the final output of a request, all of whose choices have ended."""
    return Finished(
        request_id=state.request.id,
        outcome=outcome,
        choices=tuple(_result(seq) for seq in state.sequences),
        prompt_tokens=len(state.request.prompt),
        completion_tokens=sum(seq.num_output_tokens for seq in state.sequences),
        cached_tokens=state.sequences[0].num_cached_tokens or 0,
        fault=fault,
        message=message,
    )


def _result(seq: Sequence) -> ChoiceResult:
    sent = seq.num_sent_tokens
    prompt = seq.state.sequences[0].prompt_logprobs
    return ChoiceResult(
        index=seq.index,
        text=seq.text.text,
        finish_reason=seq.finish_reason if seq.finish_reason is not None else FinishReason.ERROR,
        stop=seq.stop,
        token_ids=tuple(seq.output_tokens[:sent]),
        logprobs=tuple(seq.logprobs[:sent]) if _wants_logprobs(seq) else None,
        prompt_logprobs=tuple(prompt) if seq.request.params.prompt_logprobs is not None else None,
    )


def _wants_logprobs(seq: Sequence) -> bool:
    return seq.request.params.logprobs is not None

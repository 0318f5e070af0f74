"""``Answer``: what a trace did with the value that the step asked for at one place."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Answer:
    """The ``value`` that a trace went on with; ``where``: the user's line that asks."""

    value: bool
    where: str

    def __str__(self) -> str:
        return f"{self.where} is {self.value}"


Answers = tuple[Answer, ...]


def values_of(answers: Answers) -> tuple[bool, ...]:
    """The answers alone, in the order of the questions."""
    return tuple(each.value for each in answers)


def begin_with(answers: Answers, known: Answers) -> bool:
    """Whether a program that was traced for ``answers`` may run a call of which the first ones are ``known``."""
    return values_of(answers)[: len(known)] == values_of(known)


def with_other(answers: Answers, number: int) -> Answers:
    """The answers that a call has shown, where that of this number is not the one that its program was traced for."""
    return (*answers[:number], replace(answers[number], value=not answers[number].value))

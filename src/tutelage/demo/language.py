"""The small language of the demo task: what a user can ask, and the phrases an assistant can answer with.

A prompt names one topic; every topic has six details that belong to it and to no other. The tables are plain words so
that a reader can follow each judgement of the gold function by eye. Nothing here is random and nothing here judges.
"""

from __future__ import annotations

import re

DETAILS: dict[str, tuple[str, ...]] = {
    "cats": ("naps", "toys", "brushing", "cushions", "attention", "fish"),
    "dogs": ("walks", "training", "baths", "friends", "bones", "collars"),
    "roses": ("sun", "pruning", "soil", "mulch", "rain", "gloves"),
    "bicycles": ("tyres", "brakes", "oil", "lights", "helmets", "locks"),
    "laptops": ("memory", "backups", "updates", "screens", "chargers", "passwords"),
    "cameras": ("lenses", "batteries", "tripods", "focus", "film", "flashes"),
    "guitars": ("strings", "tuning", "chords", "picks", "songs", "rhythm"),
    "bread": ("flour", "yeast", "salt", "kneading", "ovens", "butter"),
    "soup": ("stock", "onions", "herbs", "spoons", "carrots", "bowls"),
    "coffee": ("beans", "filters", "cups", "milk", "grinding", "sugar"),
    "camping": ("tents", "matches", "blankets", "maps", "boots", "torches"),
    "exams": ("notes", "sleep", "practice", "breaks", "questions", "calm"),
}
TOPICS: tuple[str, ...] = tuple(DETAILS)
ALL_DETAILS: tuple[str, ...] = tuple(detail for details in DETAILS.values() for detail in details)

QUESTIONS: tuple[str, ...] = (
    "What should I know about {topic}?",
    "Tell me about {topic}.",
    "Can you help me with {topic}?",
    "What matters most for {topic}?",
    "Any advice about {topic}?",
    "How do I start with {topic}?",
)
CONTEXTS: tuple[str, ...] = (
    "",
    "I am new to this.",
    "I have little time.",
    "My sister wants to learn.",
    "We start tomorrow.",
    "My budget is small.",
    "This is for school.",
    "I live in a city.",
)

BODIES: tuple[str, ...] = (
    "You need {details}.",
    "Think about {details}.",
    "Start with {details}.",
    "Make sure of {details}.",
    "The secret is {details}.",
)
FILLERS: tuple[str, ...] = ("It depends.", "That is hard to say.", "Many people ask this.", "There are several ways.")
POLITE_OPENERS: tuple[str, ...] = ("Happy to help!", "Great question!", "Thank you for asking!")
POLITE_CLOSERS: tuple[str, ...] = ("Good luck!", "Hope this helps!", "Enjoy your day!")
POLITE_PHRASES: tuple[str, ...] = POLITE_OPENERS + POLITE_CLOSERS
RUDE_SENTENCES: tuple[str, ...] = ("What a silly thing.", "Do not be lazy.", "This is so boring.")
RUDE_WORDS: frozenset[str] = frozenset({"silly", "lazy", "boring"})

_WORD = re.compile(r"[a-z]+")


def words(text: str) -> list[str]:
    """The lower-cased words of a text, in order; punctuation and digits are not words."""
    return _WORD.findall(text.lower())


def topic_of(prompt: str) -> str | None:
    """The first topic a prompt names, or None."""
    return next((word for word in words(prompt) if word in DETAILS), None)


def every_prompt() -> list[str]:
    """All prompts of the language, in a fixed order: every context with every question about every topic."""
    return [
        f"{context} {question.format(topic=topic)}".strip()
        for topic in TOPICS
        for question in QUESTIONS
        for context in CONTEXTS
    ]


def every_sentence() -> list[str]:
    """A list of texts that holds every word of the language in every position it can take: the tokenizer's source."""
    answers = [
        *(body.format(details=f"{detail}, {detail} and {detail}") for body in BODIES for detail in ALL_DETAILS),
        *FILLERS,
        *POLITE_PHRASES,
        *RUDE_SENTENCES,
    ]
    return [*every_prompt(), *answers, *(f"{FILLERS[0]} {answer}" for answer in answers)]

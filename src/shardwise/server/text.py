"""What an answer's text passes through while it streams: the split at </think>, and stop strings.

Both give out all that is certain and hold back only what may turn out to be the start of a mark.
"""

from collections.abc import Sequence

THINK_START, THINK_END = "<think>", "</think>"


def _failures(mark: str) -> list[int]:
    """Knuth-Morris-Pratt: of each prefix of `mark`, how long the longest is that both starts and ends it."""
    failures = [0] * len(mark)
    length = 0
    for i in range(1, len(mark)):
        while length and mark[i] != mark[length]:
            length = failures[length - 1]
        length += mark[i] == mark[length]
        failures[i] = length
    return failures


class _Search:
    """Finds one mark in text that comes in pieces. `length`: how much of it the text so far ends with."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.length = 0
        self._failures = _failures(mark)

    def add(self, character: str) -> bool:
        """Whether `character` completes the mark."""
        while self.length and self.mark[self.length] != character:
            self.length = self._failures[self.length - 1]
        self.length += self.mark[self.length] == character
        return self.length == len(self.mark)


class StopStrings:
    """Ends an answer at the first of some strings. `matched` says at which; then no more may be added."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """include: whether the stop string itself is given out."""
        self.matched: str | None = None
        self._include = include
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""

    def add(self, text: str, scan: bool = True) -> str:
        """What of the text so far can be given out. scan: false while the answer may not stop yet."""
        if not self._searches or not scan:
            text, self._held = self._held + text, ""
            for search in self._searches:
                search.length = 0
            return text
        for i, character in enumerate(text):
            found = [search.mark for search in self._searches if search.add(character)]
            if found:
                self.matched = max(found, key=len)
                text = self._held + text[: i + 1]
                self._held = ""
                return text if self._include else text[: -len(self.matched)]
        text = self._held + text
        held = max(search.length for search in self._searches)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, now that no more comes."""
        held, self._held = self._held, ""
        return held


class ReasoningSplitter:
    """Parts what a model thinks from what it answers. White space around the thought, and before the answer, goes.

    The family's templates open <think> themselves, so an answer starts inside of it; others let the model open it.
    """

    def __init__(self, prompt: str) -> None:
        """prompt: as the chat template made it; its end tells whether the model starts by thinking."""
        self._state = "thinking" if prompt.rstrip().endswith(THINK_START) else "start"
        self._held = ""
        self._skip_space = True

    @property
    def thinking(self) -> bool:
        return self._state == "thinking"

    def add(self, text: str) -> tuple[str, str]:
        """New (reasoning, content) that are certain."""
        self._held += text
        if self._state == "start" and not self._started():
            return "", ""
        reasoning = ""
        if self._state == "thinking":
            reasoning = self._think()
            if self._state == "thinking":
                return reasoning, ""
        content, self._held = self._held, ""
        if self._skip_space:
            content = content.lstrip("\n")
            self._skip_space = not content
        return reasoning, content

    def _started(self) -> bool:
        """Whether it is known if the model opens <think> by itself."""
        begin = self._held.lstrip()
        if begin.startswith(THINK_START):
            self._state = "thinking"
            self._held = begin[len(THINK_START) :]
        elif THINK_START.startswith(begin):  # also if there is nothing yet
            return False
        else:
            self._state = "answer"
        return True

    def _think(self) -> str:
        if self._skip_space:
            self._held = self._held.lstrip()
        thought, end, rest = self._held.partition(THINK_END)
        if end:
            self._state, self._held, self._skip_space = "answer", rest, True
            return thought.rstrip()
        # Hold what may be the start of </think>, and white space that may be the last before it.
        kept = max(k for k in range(len(THINK_END)) if thought.endswith(THINK_END[:k]))
        certain = thought[: len(thought) - kept].rstrip()
        self._held = thought[len(certain) :]
        self._skip_space = self._skip_space and not certain
        return certain

    def finish(self) -> tuple[str, str]:
        """What was held back, now that no more comes."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._state == "thinking" else ("", held)

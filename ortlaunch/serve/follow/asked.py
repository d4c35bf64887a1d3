"""What can be asked of the list of runs: the query parameters of the API's route and of the page."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

Word = Annotated[str, Field(max_length=400)]
NEWEST_FIRST = "-started"


class RunQuery(BaseModel):
    """A part of the list of runs. `state`, `owner` and `experiment` take several values with commas between them."""

    state: Word = ""
    owner: Word = ""
    experiment: Word = ""
    text: Word = ""
    """It is looked for in the name, the experiment and the ids."""
    sort: Word = NEWEST_FIRST
    page: Annotated[int, Field(ge=1, le=1_000_000)] = 1

    @property
    def filters(self) -> dict[str, str]:
        """The values of what the list is filtered by; an empty one lets all pass."""
        return {"state": self.state, "owner": self.owner, "experiment": self.experiment, "text": self.text}

"""What can be asked of the list of runs: the query parameters of the API's route and of the page."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Word = Annotated[str, Field(max_length=400)]
NEWEST_FIRST = "-started"
MOST_COLUMNS = 12


class RunQuery(BaseModel):
    """A part of the list of runs. `state`, `owner` and `experiment` take several values with commas between them."""

    model_config = ConfigDict(extra="forbid")
    state: Word = ""
    owner: Word = ""
    experiment: Word = ""
    project: Word = ""
    text: Word = ""
    """It is looked for in the name, the experiment, the ids, the tags and the note."""
    where: Word = ""
    """Conditions on parameters and metrics with commas between them, such as ``train.lr<0.01, eval/loss<=2``."""
    sweep: Word = ""
    columns: Annotated[list[Word], Field(max_length=MOST_COLUMNS)] = []
    """Parameters and metrics that each row shows too."""
    sort: Word = NEWEST_FIRST
    page: Annotated[int, Field(ge=1, le=1_000_000)] = 1

    @property
    def filters(self) -> dict[str, str]:
        """The values of what the list is filtered by; an empty one lets all pass."""
        names = ("state", "owner", "experiment", "project", "text", "where", "sweep")
        return {name: getattr(self, name) for name in names}

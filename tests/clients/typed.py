"""What clients' scripts ask for as Python types: an object, and the arguments of a tool."""

from typing import Literal

from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    is_large: bool
    river: Literal["Seine", "Thames"]


def get_weather(city: Literal["Paris", "London"]) -> str:
    """The weather."""
    return "rain"

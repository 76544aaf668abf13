"""What the laboratory adds to the library. The library imports it when it looks up a name.

Importing this module registers the published partitions (`coterie.data.PROBLEMS`), the published
networks (`coterie.models.MODELS`) and the list of recipes.
"""

from coterie import catalogue
from coterie.catalogue import Entry
from coterie_lab import networks
from coterie_lab.partitions import blends, classes, kinds, published

assert networks
assert blends
assert classes
assert kinds
assert published


def list_recipes() -> dict[str, Entry]:
    """All published tables and figures, each with a title and an explanation."""
    from coterie_lab import recipes  # noqa: F401 - registers them
    from coterie_lab.recipe import RECIPES, Recipe

    def explain(name: str, recipe: Recipe) -> str:
        parts = [
            f"Run it with: coterie reproduce {name}",
            f"{len(recipe.studies())} studies with {len(recipe.seeds)} seeds, about "
            f"{recipe.hours():.1f} hours on one core. For a quick check: --scale quick",
            *(f"Difference from the paper: {text}" for text in recipe.departures),
            *recipe.notes,
        ]
        return "\n".join(parts)

    return {
        name: Entry(f"{recipe.paper}, {recipe.title}", explain(name, recipe))
        for name, recipe in RECIPES.items()
    }


catalogue.RECIPE_LISTS.append(list_recipes)

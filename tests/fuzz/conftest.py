"""The bundle of the hostile tests, of which each test changes its own copy."""

from tests.hostile.conftest import editor as editor
from tests.hostile.conftest import sound as sound

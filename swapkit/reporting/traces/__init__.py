"""Steps and memory in the formats of other tools' viewers."""

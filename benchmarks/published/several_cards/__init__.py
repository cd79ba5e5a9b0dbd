"""Published memory of trainings on several cards, and the same trainings rehearsed as one rank."""

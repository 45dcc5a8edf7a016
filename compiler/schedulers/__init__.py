"""Schedulers: the named schedules, a search for any stages, costs and limits, and the choice by a plan."""
